"""The model judged by what others published: sweeps of tiles, winners of searches, times of
libraries. `python -m benchmarks.published --data DIR` reads the tables and writes the verdicts.

Each source has a reader (attentionfuse, aotriton, ffpa, ibm, curves, splits), all of them make the
records of records.py, judge.py compares those with the model, fit.py finds constants.
"""
