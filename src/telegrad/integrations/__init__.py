"""The hook in trainers that wrap models themselves. Each module needs its trainer."""
