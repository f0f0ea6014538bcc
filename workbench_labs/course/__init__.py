"""The course: labs in which students build, what judges their answers, and how a teacher collects and grades them."""
