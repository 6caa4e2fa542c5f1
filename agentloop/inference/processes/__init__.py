"""SGLang servers of our own: started, watched, restarted."""
