"""From the tensors of a call to its plan: the facts of a call (`call`), the plans of calls alike
(`plans`, `dispatch`), and the same for pages."""
