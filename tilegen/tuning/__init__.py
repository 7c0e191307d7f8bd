"""Tuning one kernel (`tuner`): what to try, what was tried, the machine, what is said, and how long
a launch takes (`measure`)."""
