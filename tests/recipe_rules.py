"""The rule of a recipe, by the end of its name."""

RECIPE_RULES = {
    "adamw": "adamw",
    "muon": "muon",
    "muon_sphere": "muon_sphere",
    "sso": "spectral_sphere",
}
"""Ends of recipes' names and the rules of their matrices."""
