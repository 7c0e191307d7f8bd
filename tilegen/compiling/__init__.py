"""From the text of a kernel to a binary (`compiler`), in other processes (`workers`), and whether
it may be used (`acceptable`)."""
