"""The ways to call: `attention`, with documents, pages, and the names of other packages."""
