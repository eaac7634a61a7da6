"""Context managers that change torch, Python or the model's files while a model is traced."""
