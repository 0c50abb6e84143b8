"""The sections of the run config, a file per subject: fields, their sentences, and what must hold
in the section by itself (`problems`).

What must hold between sections is not here but in training/config/checks/. A new key is a field
with a sentence under it; docs/configuration.md is made from these. Start with train.py."""
