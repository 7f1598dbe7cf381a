"""What people see of results: tables, progress bars and plots. Needs rich and matplotlib."""
