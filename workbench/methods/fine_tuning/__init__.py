"""Fine-tuning by backpropagation through the backbone: the baseline of PAC+ (section VI-A)."""
