"""Files and curves that a script of another library writes."""
