"""The trainer of all methods that use backpropagation; a method supplies its phases, their programs and handlers."""
