"""Tasks: files, data sets, generators, and a teacher's dialogues."""
