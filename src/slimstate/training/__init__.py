"""Fine-tuning of cut models and pre-training, on transformers.Trainer."""
