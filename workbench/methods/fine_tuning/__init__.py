"""Fine-tuning by backpropagation through the backbone: what PAC+ is compared with (section VI-A)."""
