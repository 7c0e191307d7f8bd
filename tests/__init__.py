"""The test suite, one folder per tier; `conftest.py` says what each needs."""
