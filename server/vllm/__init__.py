"""Routes of vLLM by which trainers and evaluations steer a server: pause, resume, reset the cache, facts."""
