"""Plan a call from its tensors: facts of the call (`call`), cached plans (`plans`), execution
(`dispatch`), and the form of calls over the pages of a cache (`paged_call`)."""
