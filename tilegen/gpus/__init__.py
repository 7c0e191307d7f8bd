"""GPUs: what each can do (`spec`), and which one stands for another (`nearest`)."""
