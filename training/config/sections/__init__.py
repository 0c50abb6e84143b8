"""The sections of the run config, a file per subject.

Here are the fields, the sentence under each that becomes its entry in docs/configuration.md, and
what must hold within the section (`problems`). What must hold between sections is in
training/config/checks.py. Start with train.py.
"""
