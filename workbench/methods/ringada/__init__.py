"""RingAda: pipelined fine-tuning of serial adapters on a ring of devices that keep their data local."""
