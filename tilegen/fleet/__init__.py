"""Tuning by many machines: jobs (`jobs`), storages (`storage`, `faults`), queues of studies
(`queue`), workers (`worker`), the machines that they measure on (`bench`), progress (`status`)."""
