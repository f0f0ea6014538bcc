"""Galaxy+: single-shot inference of one sequence on many devices (Ye et al., IEEE Transactions on Mobile Computing
2025).
"""
