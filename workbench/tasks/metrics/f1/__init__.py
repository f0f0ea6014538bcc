"""The metric 'f1' as a module of the evaluate library."""
