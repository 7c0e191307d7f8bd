"""Properties of processors for the model: the catalogue in cpus.toml, this machine, its rates."""
