# Called from compiled modules only; Python sees nothing here.
