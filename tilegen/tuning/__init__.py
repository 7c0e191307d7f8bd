"""Tuning of a kernel (`tuner`): search (`search`), log of trials (`trials`), compiling and checking
(`bench`), timing (`measure`), report (`report`); and of libraries (`libraries`)."""
