"""Right and wrong answers to the exercises, a module for each lab: `lab02` and so on.

RIGHT: by exercise whose answer is no function, what returns the right answer for a student's numbers.
WRONG: by exercise and by what is wrong, an answer and a pattern of what is said of it.  Where the answer is no code,
a function returns it for a student's numbers.
"""
