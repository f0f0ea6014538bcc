"""The one trainer of all methods that train by backpropagation: a method supplies its phases, their programs and handlers."""
