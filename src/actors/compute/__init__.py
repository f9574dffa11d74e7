"""The compute half of a worker: its rules (pure), and the parts that perform them."""
