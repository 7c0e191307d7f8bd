"""GPUs: their properties (`spec`), and stand-ins for unknown architectures (`nearest`)."""
