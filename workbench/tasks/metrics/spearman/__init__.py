"""The metric 'spearman' as a module of the evaluate library."""
