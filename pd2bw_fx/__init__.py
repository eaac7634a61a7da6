"""Split any PyTorch model into pipeline stages you can read, and train them with PipeDream-2BW."""
