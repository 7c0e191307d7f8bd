"""tilegen beside PyTorch's attention against the length: time and memory, as rows and a picture."""
