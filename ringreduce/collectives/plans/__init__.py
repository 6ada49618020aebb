"""How each collective is bound to memory and carried out."""
