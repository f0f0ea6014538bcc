"""The metric 'pearson' as a module of the evaluate library."""
