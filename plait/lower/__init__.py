"""From ATen to loops: one rule per op, found by its overload; see core.py for what a rule gets and
returns."""
