"""Our models as Hugging Face has them: names and layouts of weights, and config.json."""
