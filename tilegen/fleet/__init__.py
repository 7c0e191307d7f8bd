"""Tuning by many machines: where trials are kept (`storage`), one study (`queue`), a worker
(`worker`), measuring without a GPU (`replay`), and how far all are (`status`)."""
