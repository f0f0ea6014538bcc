"""RingAda: pipelined fine-tuning of serial adapters on a ring of devices whose data stay where they are."""
