"""How many ranks of this process the fixture ``ranks`` gives."""

SIZE = 3
