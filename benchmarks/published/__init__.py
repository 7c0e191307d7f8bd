"""The model judged by what others published: sweeps of tiles, winners of searches, times of
libraries. `python -m benchmarks.published --data DIR` reads the tables and writes the verdicts.

readers.py and winners.py make the records of records.py of each source's tables, judge.py and
decoding.py compare those with the model, fit.py finds constants.
"""
