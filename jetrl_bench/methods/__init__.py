"""The method registry: one file, one method. The file's name is the method's kind; METHOD is its settings."""
