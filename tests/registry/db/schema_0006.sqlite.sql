CREATE TABLE "adapter_aliases" (
	adapter_id VARCHAR(64) NOT NULL,
	alias VARCHAR(63) NOT NULL,
	version INTEGER NOT NULL,
	weight INTEGER DEFAULT '1' NOT NULL,
	CONSTRAINT pk_adapter_aliases PRIMARY KEY (adapter_id, alias, version),
	CONSTRAINT fk_adapter_aliases_adapter_id_version FOREIGN KEY(adapter_id, version) REFERENCES adapter_versions (adapter_id, version) ON DELETE CASCADE
);
CREATE TABLE "adapter_grants" (
	adapter_id VARCHAR(64) NOT NULL,
	tenant_id VARCHAR(64) NOT NULL,
	created_at BIGINT NOT NULL,
	version INTEGER DEFAULT '0' NOT NULL,
	CONSTRAINT pk_adapter_grants PRIMARY KEY (adapter_id, tenant_id, version),
	CONSTRAINT fk_adapter_grants_adapter_id FOREIGN KEY(adapter_id) REFERENCES adapters (id) ON DELETE CASCADE,
	CONSTRAINT fk_adapter_grants_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE CASCADE
);
CREATE TABLE adapter_versions (
	adapter_id VARCHAR(64) NOT NULL,
	version INTEGER NOT NULL,
	digest VARCHAR(71) NOT NULL,
	weights_sha256 VARCHAR(64) NOT NULL,
	spec JSON NOT NULL,
	rank INTEGER NOT NULL,
	target_modules JSON NOT NULL,
	applied INTEGER NOT NULL,
	total INTEGER NOT NULL,
	parameters BIGINT NOT NULL,
	size_bytes BIGINT NOT NULL,
	created_at BIGINT NOT NULL, report JSON DEFAULT '{}' NOT NULL,
	CONSTRAINT pk_adapter_versions PRIMARY KEY (adapter_id, version),
	CONSTRAINT fk_adapter_versions_adapter_id FOREIGN KEY(adapter_id) REFERENCES adapters (id) ON DELETE CASCADE,
	CONSTRAINT uq_adapter_versions_adapter_id_digest UNIQUE (adapter_id, digest)
);
CREATE TABLE adapters (
	id VARCHAR(64) NOT NULL,
	tenant_id VARCHAR(64) NOT NULL,
	name VARCHAR(63) NOT NULL,
	description TEXT,
	pinned BOOLEAN NOT NULL,
	next_version INTEGER NOT NULL,
	created_at BIGINT NOT NULL,
	CONSTRAINT pk_adapters PRIMARY KEY (id),
	CONSTRAINT fk_adapters_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE CASCADE,
	CONSTRAINT uq_adapters_tenant_id_name UNIQUE (tenant_id, name)
);
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0006');
CREATE TABLE api_keys (
	id VARCHAR(64) NOT NULL,
	tenant_id VARCHAR(64) NOT NULL,
	name VARCHAR(255),
	prefix VARCHAR(32) NOT NULL,
	digest VARCHAR(64) NOT NULL,
	scopes JSON NOT NULL,
	expires_at BIGINT,
	created_at BIGINT NOT NULL,
	revoked_at BIGINT, limits JSON DEFAULT '{}' NOT NULL, previous_prefix VARCHAR(32), previous_digest VARCHAR(64), previous_until BIGINT,
	CONSTRAINT pk_api_keys PRIMARY KEY (id),
	CONSTRAINT fk_api_keys_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE CASCADE,
	CONSTRAINT uq_api_keys_prefix UNIQUE (prefix)
);
CREATE TABLE audit_log (
	id INTEGER NOT NULL,
	at BIGINT NOT NULL,
	actor VARCHAR(64) NOT NULL,
	action VARCHAR(64) NOT NULL,
	tenant VARCHAR(63) NOT NULL,
	target VARCHAR(255) NOT NULL,
	detail JSON NOT NULL,
	CONSTRAINT pk_audit_log PRIMARY KEY (id)
);
CREATE TABLE batch_results (
	batch_id VARCHAR(64) NOT NULL,
	line INTEGER NOT NULL,
	is_error BOOLEAN NOT NULL,
	result TEXT NOT NULL,
	CONSTRAINT pk_batch_results PRIMARY KEY (batch_id, line),
	CONSTRAINT fk_batch_results_batch_id FOREIGN KEY(batch_id) REFERENCES batches (id) ON DELETE CASCADE
);
CREATE TABLE batches (
	id VARCHAR(64) NOT NULL,
	tenant_id VARCHAR(64) NOT NULL,
	key_id VARCHAR(64) NOT NULL,
	endpoint VARCHAR(64) NOT NULL,
	input_file_id VARCHAR(64) NOT NULL,
	input_sha256 VARCHAR(64) NOT NULL,
	status VARCHAR(16) NOT NULL,
	owner VARCHAR(64) NOT NULL,
	total INTEGER NOT NULL,
	completed INTEGER NOT NULL,
	failed INTEGER NOT NULL,
	created_at BIGINT NOT NULL,
	expires_at BIGINT NOT NULL,
	lease_until BIGINT NOT NULL,
	output_file_id VARCHAR(64),
	error_file_id VARCHAR(64),
	labels JSON,
	errors JSON,
	in_progress_at BIGINT,
	finalizing_at BIGINT,
	completed_at BIGINT,
	failed_at BIGINT,
	expired_at BIGINT,
	cancelling_at BIGINT,
	cancelled_at BIGINT,
	CONSTRAINT pk_batches PRIMARY KEY (id),
	CONSTRAINT fk_batches_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE CASCADE
);
CREATE TABLE files (
	id VARCHAR(64) NOT NULL,
	tenant_id VARCHAR(64) NOT NULL,
	filename VARCHAR(255) NOT NULL,
	purpose VARCHAR(16) NOT NULL,
	size_bytes BIGINT NOT NULL,
	sha256 VARCHAR(64) NOT NULL,
	created_at BIGINT NOT NULL,
	expires_at BIGINT NOT NULL,
	CONSTRAINT pk_files PRIMARY KEY (id),
	CONSTRAINT fk_files_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE CASCADE
);
CREATE TABLE idempotency_keys (
	tenant_id VARCHAR(64) NOT NULL,
	"key" VARCHAR(255) NOT NULL,
	body_digest VARCHAR(64) NOT NULL,
	status INTEGER NOT NULL,
	response JSON NOT NULL,
	created_at BIGINT NOT NULL,
	CONSTRAINT pk_idempotency_keys PRIMARY KEY (tenant_id, "key"),
	CONSTRAINT fk_idempotency_keys_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE CASCADE
);
CREATE TABLE sessions (
	digest VARCHAR(64) NOT NULL,
	kind VARCHAR(16) NOT NULL,
	key_prefix VARCHAR(32) NOT NULL,
	key_digest VARCHAR(64) NOT NULL,
	expires_at BIGINT NOT NULL,
	CONSTRAINT pk_sessions PRIMARY KEY (digest)
);
CREATE TABLE tenants (
	id VARCHAR(64) NOT NULL,
	name VARCHAR(63) NOT NULL,
	limits JSON NOT NULL,
	created_at BIGINT NOT NULL, weight FLOAT DEFAULT '1' NOT NULL,
	CONSTRAINT pk_tenants PRIMARY KEY (id),
	CONSTRAINT uq_tenants_name UNIQUE (name)
);
CREATE TABLE uploads (
	id VARCHAR(64) NOT NULL,
	tenant_id VARCHAR(64) NOT NULL,
	key_id VARCHAR(64) NOT NULL,
	name VARCHAR(63) NOT NULL,
	description TEXT,
	activate BOOLEAN NOT NULL,
	manifest JSON NOT NULL,
	size_bytes BIGINT NOT NULL,
	state VARCHAR(16) NOT NULL,
	result JSON,
	created_at BIGINT NOT NULL,
	expires_at BIGINT NOT NULL,
	CONSTRAINT pk_uploads PRIMARY KEY (id),
	CONSTRAINT fk_uploads_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE CASCADE
);
CREATE TABLE usage_adapters (
	adapter_id VARCHAR(64) NOT NULL,
	key_id VARCHAR(64) NOT NULL,
	requests BIGINT NOT NULL,
	prompt_tokens BIGINT NOT NULL,
	cached_tokens BIGINT NOT NULL,
	completion_tokens BIGINT NOT NULL,
	last_at BIGINT NOT NULL,
	CONSTRAINT pk_usage_adapters PRIMARY KEY (adapter_id, key_id)
)
 WITHOUT ROWID

;
CREATE TABLE usage_events (
	id VARCHAR(64) NOT NULL,
	at BIGINT NOT NULL,
	tenant_id VARCHAR(64) NOT NULL,
	tenant VARCHAR(63) NOT NULL,
	key_id VARCHAR(64) NOT NULL,
	adapter_id VARCHAR(64) NOT NULL,
	adapter VARCHAR(127) NOT NULL,
	adapter_version INTEGER NOT NULL,
	adapter_digest VARCHAR(71) NOT NULL,
	request_id VARCHAR(256) NOT NULL,
	endpoint VARCHAR(64) NOT NULL,
	status VARCHAR(64) NOT NULL,
	prompt_tokens BIGINT NOT NULL,
	cached_tokens BIGINT NOT NULL,
	completion_tokens BIGINT NOT NULL,
	queue_s FLOAT,
	ttft_s FLOAT,
	duration_s FLOAT,
	adapter_state VARCHAR(16) NOT NULL, service_class VARCHAR(16) DEFAULT 'interactive' NOT NULL,
	CONSTRAINT pk_usage_events PRIMARY KEY (id)
);
CREATE TABLE usage_latency (
	at BIGINT NOT NULL,
	tenant_id VARCHAR(64) NOT NULL,
	adapter_id VARCHAR(64) NOT NULL,
	adapter_version INTEGER NOT NULL,
	key_id VARCHAR(64) NOT NULL,
	adapter_state VARCHAR(16) NOT NULL,
	bin INTEGER NOT NULL,
	tenant VARCHAR(63) NOT NULL,
	adapter VARCHAR(127) NOT NULL,
	requests BIGINT NOT NULL,
	CONSTRAINT pk_usage_latency PRIMARY KEY (at, tenant_id, adapter_id, adapter_version, key_id, adapter_state, bin)
)
 WITHOUT ROWID

;
CREATE TABLE "usage_rollups" (
	at BIGINT NOT NULL,
	tenant_id VARCHAR(64) NOT NULL,
	adapter_id VARCHAR(64) NOT NULL,
	adapter_version INTEGER NOT NULL,
	key_id VARCHAR(64) NOT NULL,
	tenant VARCHAR(63) NOT NULL,
	adapter VARCHAR(127) NOT NULL,
	requests BIGINT NOT NULL,
	prompt_tokens BIGINT NOT NULL,
	cached_tokens BIGINT NOT NULL,
	completion_tokens BIGINT NOT NULL,
	last_at BIGINT NOT NULL,
	status VARCHAR(64) DEFAULT ('') NOT NULL,
	service_class VARCHAR(16) DEFAULT 'interactive' NOT NULL,
	CONSTRAINT pk_usage_rollups PRIMARY KEY (at, tenant_id, adapter_id, adapter_version, key_id, status, service_class)
)
 WITHOUT ROWID

;
CREATE INDEX ix_api_keys_tenant_id ON api_keys (tenant_id);
CREATE INDEX ix_idempotency_keys_created_at ON idempotency_keys (created_at);
CREATE INDEX ix_adapters_name ON adapters (name);
CREATE INDEX ix_adapter_versions_digest ON adapter_versions (digest);
CREATE INDEX ix_adapter_versions_weights_sha256 ON adapter_versions (weights_sha256);
CREATE INDEX ix_usage_events_at ON usage_events (at);
CREATE INDEX ix_usage_events_tenant_id_at ON usage_events (tenant_id, at);
CREATE INDEX ix_api_keys_previous_prefix ON api_keys (previous_prefix);
CREATE INDEX ix_adapter_grants_tenant_id ON adapter_grants (tenant_id);
CREATE INDEX ix_uploads_tenant_id ON uploads (tenant_id);
CREATE INDEX ix_uploads_expires_at ON uploads (expires_at);
CREATE INDEX ix_sessions_expires_at ON sessions (expires_at);
CREATE INDEX ix_files_tenant_id ON files (tenant_id);
CREATE INDEX ix_files_sha256 ON files (sha256);
CREATE INDEX ix_files_expires_at ON files (expires_at);
CREATE INDEX ix_batches_tenant_id ON batches (tenant_id);
CREATE INDEX ix_batches_status ON batches (status);
