"""Everything that must know its rank: process groups, placement and exchange."""
