"""How recipes are named by their optimizer."""

RECIPE_RULES = {
    "adamw": "adamw",
    "muon": "muon",
    "muon_sphere": "muon_sphere",
    "sso": "spectral_sphere",
}
"""The end of a recipe's name and the rule of its matrices."""
