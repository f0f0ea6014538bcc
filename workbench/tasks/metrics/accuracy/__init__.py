"""The metric 'accuracy' as a module of the evaluate library."""
