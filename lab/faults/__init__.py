"""Random faults among real processes, from seeds: does a job hang, get a wrong sum, or blame the wrong rank?

``trials`` draws what is called and what goes wrong, ``ranks`` is what each process runs, ``runs`` starts them, and
``judge`` says what was wrong.
"""
