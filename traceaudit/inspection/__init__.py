"""What traces hold and what they lack, what each lack costs in certainty, and how to record it.

Nothing is attributed here: the files are read, counted and held against what attribution would need of them.
`holding` says what one file holds, `lacks` what single files lack, `job` what they lack together; `inspect` is the
answer.
"""
