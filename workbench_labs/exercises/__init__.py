"""The labs' exercises, a module for each topic: how their numbers are drawn and their answers are judged."""
