"""Plan a call from its tensors: facts of the call (`call`), cached plans (`plans`), execution
(`dispatch`), and the same for paged caches."""
