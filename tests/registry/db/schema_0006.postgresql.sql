CREATE TABLE public.adapter_aliases (
    adapter_id character varying(64) NOT NULL,
    alias character varying(63) NOT NULL COLLATE pg_catalog."C",
    version integer NOT NULL,
    weight integer DEFAULT 1 NOT NULL
);
CREATE TABLE public.adapter_grants (
    adapter_id character varying(64) NOT NULL,
    tenant_id character varying(64) NOT NULL,
    created_at bigint NOT NULL,
    version integer DEFAULT 0 NOT NULL
);
CREATE TABLE public.adapter_versions (
    adapter_id character varying(64) NOT NULL,
    version integer NOT NULL,
    digest character varying(71) NOT NULL,
    weights_sha256 character varying(64) NOT NULL,
    spec json NOT NULL,
    rank integer NOT NULL,
    target_modules json NOT NULL,
    applied integer NOT NULL,
    total integer NOT NULL,
    parameters bigint NOT NULL,
    size_bytes bigint NOT NULL,
    created_at bigint NOT NULL,
    report json DEFAULT '{}'::json NOT NULL
);
CREATE TABLE public.adapters (
    id character varying(64) NOT NULL,
    tenant_id character varying(64) NOT NULL,
    name character varying(63) NOT NULL COLLATE pg_catalog."C",
    description text,
    pinned boolean NOT NULL,
    next_version integer NOT NULL,
    created_at bigint NOT NULL
);
CREATE TABLE public.alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE public.api_keys (
    id character varying(64) NOT NULL,
    tenant_id character varying(64) NOT NULL,
    name character varying(255),
    prefix character varying(32) NOT NULL,
    digest character varying(64) NOT NULL,
    scopes json NOT NULL,
    expires_at bigint,
    created_at bigint NOT NULL,
    revoked_at bigint,
    limits json DEFAULT '{}'::json NOT NULL,
    previous_prefix character varying(32),
    previous_digest character varying(64),
    previous_until bigint
);
CREATE TABLE public.audit_log (
    id bigint NOT NULL,
    at bigint NOT NULL,
    actor character varying(64) NOT NULL,
    action character varying(64) NOT NULL,
    tenant character varying(63) NOT NULL,
    target character varying(255) NOT NULL,
    detail json NOT NULL
);
CREATE SEQUENCE public.audit_log_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.audit_log_id_seq OWNED BY public.audit_log.id;
CREATE TABLE public.batch_results (
    batch_id character varying(64) NOT NULL COLLATE pg_catalog."C",
    line integer NOT NULL,
    is_error boolean NOT NULL,
    result text NOT NULL
);
CREATE TABLE public.batches (
    id character varying(64) NOT NULL COLLATE pg_catalog."C",
    tenant_id character varying(64) NOT NULL,
    key_id character varying(64) NOT NULL,
    endpoint character varying(64) NOT NULL,
    input_file_id character varying(64) NOT NULL,
    input_sha256 character varying(64) NOT NULL,
    status character varying(16) NOT NULL,
    owner character varying(64) NOT NULL,
    total integer NOT NULL,
    completed integer NOT NULL,
    failed integer NOT NULL,
    created_at bigint NOT NULL,
    expires_at bigint NOT NULL,
    lease_until bigint NOT NULL,
    output_file_id character varying(64),
    error_file_id character varying(64),
    labels json,
    errors json,
    in_progress_at bigint,
    finalizing_at bigint,
    completed_at bigint,
    failed_at bigint,
    expired_at bigint,
    cancelling_at bigint,
    cancelled_at bigint
);
CREATE TABLE public.files (
    id character varying(64) NOT NULL COLLATE pg_catalog."C",
    tenant_id character varying(64) NOT NULL,
    filename character varying(255) NOT NULL,
    purpose character varying(16) NOT NULL,
    size_bytes bigint NOT NULL,
    sha256 character varying(64) NOT NULL,
    created_at bigint NOT NULL,
    expires_at bigint NOT NULL
);
CREATE TABLE public.idempotency_keys (
    tenant_id character varying(64) NOT NULL,
    key character varying(255) NOT NULL,
    body_digest character varying(64) NOT NULL,
    status integer NOT NULL,
    response json NOT NULL,
    created_at bigint NOT NULL
);
CREATE TABLE public.sessions (
    digest character varying(64) NOT NULL,
    kind character varying(16) NOT NULL,
    key_prefix character varying(32) NOT NULL,
    key_digest character varying(64) NOT NULL,
    expires_at bigint NOT NULL
);
CREATE TABLE public.tenants (
    id character varying(64) NOT NULL,
    name character varying(63) NOT NULL COLLATE pg_catalog."C",
    limits json NOT NULL,
    created_at bigint NOT NULL,
    weight double precision DEFAULT '1'::double precision NOT NULL
);
CREATE TABLE public.uploads (
    id character varying(64) NOT NULL,
    tenant_id character varying(64) NOT NULL,
    key_id character varying(64) NOT NULL,
    name character varying(63) NOT NULL,
    description text,
    activate boolean NOT NULL,
    manifest json NOT NULL,
    size_bytes bigint NOT NULL,
    state character varying(16) NOT NULL,
    result json,
    created_at bigint NOT NULL,
    expires_at bigint NOT NULL
);
CREATE TABLE public.usage_adapters (
    adapter_id character varying(64) NOT NULL,
    key_id character varying(64) NOT NULL,
    requests bigint NOT NULL,
    prompt_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    last_at bigint NOT NULL
);
CREATE TABLE public.usage_events (
    id character varying(64) NOT NULL,
    at bigint NOT NULL,
    tenant_id character varying(64) NOT NULL COLLATE pg_catalog."C",
    tenant character varying(63) NOT NULL,
    key_id character varying(64) NOT NULL COLLATE pg_catalog."C",
    adapter_id character varying(64) NOT NULL COLLATE pg_catalog."C",
    adapter character varying(127) NOT NULL,
    adapter_version integer NOT NULL,
    adapter_digest character varying(71) NOT NULL,
    request_id character varying(256) NOT NULL,
    endpoint character varying(64) NOT NULL,
    status character varying(64) NOT NULL COLLATE pg_catalog."C",
    prompt_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    queue_s double precision,
    ttft_s double precision,
    duration_s double precision,
    adapter_state character varying(16) NOT NULL,
    service_class character varying(16) DEFAULT 'interactive'::character varying NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE public.usage_latency (
    at bigint NOT NULL,
    tenant_id character varying(64) NOT NULL COLLATE pg_catalog."C",
    adapter_id character varying(64) NOT NULL COLLATE pg_catalog."C",
    adapter_version integer NOT NULL,
    key_id character varying(64) NOT NULL COLLATE pg_catalog."C",
    adapter_state character varying(16) NOT NULL,
    bin integer NOT NULL,
    tenant character varying(63) NOT NULL,
    adapter character varying(127) NOT NULL,
    requests bigint NOT NULL
);
CREATE TABLE public.usage_rollups (
    at bigint NOT NULL,
    tenant_id character varying(64) NOT NULL COLLATE pg_catalog."C",
    adapter_id character varying(64) NOT NULL COLLATE pg_catalog."C",
    adapter_version integer NOT NULL,
    key_id character varying(64) NOT NULL COLLATE pg_catalog."C",
    tenant character varying(63) NOT NULL,
    adapter character varying(127) NOT NULL,
    requests bigint NOT NULL,
    prompt_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    last_at bigint NOT NULL,
    status character varying(64) DEFAULT ''::character varying NOT NULL COLLATE pg_catalog."C",
    service_class character varying(16) DEFAULT 'interactive'::character varying NOT NULL COLLATE pg_catalog."C"
);
ALTER TABLE ONLY public.audit_log ALTER COLUMN id SET DEFAULT nextval('public.audit_log_id_seq'::regclass);
INSERT INTO public.alembic_version VALUES ('0006');
SELECT pg_catalog.setval('public.audit_log_id_seq', 1, false);
ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.adapter_aliases
    ADD CONSTRAINT pk_adapter_aliases PRIMARY KEY (adapter_id, alias, version);
ALTER TABLE ONLY public.adapter_grants
    ADD CONSTRAINT pk_adapter_grants PRIMARY KEY (adapter_id, tenant_id, version);
ALTER TABLE ONLY public.adapter_versions
    ADD CONSTRAINT pk_adapter_versions PRIMARY KEY (adapter_id, version);
ALTER TABLE ONLY public.adapters
    ADD CONSTRAINT pk_adapters PRIMARY KEY (id);
ALTER TABLE ONLY public.api_keys
    ADD CONSTRAINT pk_api_keys PRIMARY KEY (id);
ALTER TABLE ONLY public.audit_log
    ADD CONSTRAINT pk_audit_log PRIMARY KEY (id);
ALTER TABLE ONLY public.batch_results
    ADD CONSTRAINT pk_batch_results PRIMARY KEY (batch_id, line);
ALTER TABLE ONLY public.batches
    ADD CONSTRAINT pk_batches PRIMARY KEY (id);
ALTER TABLE ONLY public.files
    ADD CONSTRAINT pk_files PRIMARY KEY (id);
ALTER TABLE ONLY public.idempotency_keys
    ADD CONSTRAINT pk_idempotency_keys PRIMARY KEY (tenant_id, key);
ALTER TABLE ONLY public.sessions
    ADD CONSTRAINT pk_sessions PRIMARY KEY (digest);
ALTER TABLE ONLY public.tenants
    ADD CONSTRAINT pk_tenants PRIMARY KEY (id);
ALTER TABLE ONLY public.uploads
    ADD CONSTRAINT pk_uploads PRIMARY KEY (id);
ALTER TABLE ONLY public.usage_adapters
    ADD CONSTRAINT pk_usage_adapters PRIMARY KEY (adapter_id, key_id);
ALTER TABLE ONLY public.usage_events
    ADD CONSTRAINT pk_usage_events PRIMARY KEY (id);
ALTER TABLE ONLY public.usage_latency
    ADD CONSTRAINT pk_usage_latency PRIMARY KEY (at, tenant_id, adapter_id, adapter_version, key_id, adapter_state, bin);
ALTER TABLE ONLY public.usage_rollups
    ADD CONSTRAINT pk_usage_rollups PRIMARY KEY (at, tenant_id, adapter_id, adapter_version, key_id, status, service_class);
ALTER TABLE ONLY public.adapter_versions
    ADD CONSTRAINT uq_adapter_versions_adapter_id_digest UNIQUE (adapter_id, digest);
ALTER TABLE ONLY public.adapters
    ADD CONSTRAINT uq_adapters_tenant_id_name UNIQUE (tenant_id, name);
ALTER TABLE ONLY public.api_keys
    ADD CONSTRAINT uq_api_keys_prefix UNIQUE (prefix);
ALTER TABLE ONLY public.tenants
    ADD CONSTRAINT uq_tenants_name UNIQUE (name);
CREATE INDEX ix_adapter_grants_tenant_id ON public.adapter_grants USING btree (tenant_id);
CREATE INDEX ix_adapter_versions_digest ON public.adapter_versions USING btree (digest);
CREATE INDEX ix_adapter_versions_weights_sha256 ON public.adapter_versions USING btree (weights_sha256);
CREATE INDEX ix_adapters_name ON public.adapters USING btree (name);
CREATE INDEX ix_api_keys_previous_prefix ON public.api_keys USING btree (previous_prefix);
CREATE INDEX ix_api_keys_tenant_id ON public.api_keys USING btree (tenant_id);
CREATE INDEX ix_batches_status ON public.batches USING btree (status);
CREATE INDEX ix_batches_tenant_id ON public.batches USING btree (tenant_id);
CREATE INDEX ix_files_expires_at ON public.files USING btree (expires_at);
CREATE INDEX ix_files_sha256 ON public.files USING btree (sha256);
CREATE INDEX ix_files_tenant_id ON public.files USING btree (tenant_id);
CREATE INDEX ix_idempotency_keys_created_at ON public.idempotency_keys USING btree (created_at);
CREATE INDEX ix_sessions_expires_at ON public.sessions USING btree (expires_at);
CREATE INDEX ix_uploads_expires_at ON public.uploads USING btree (expires_at);
CREATE INDEX ix_uploads_tenant_id ON public.uploads USING btree (tenant_id);
CREATE INDEX ix_usage_events_at ON public.usage_events USING btree (at);
CREATE INDEX ix_usage_events_tenant_id_at ON public.usage_events USING btree (tenant_id, at);
ALTER TABLE ONLY public.adapter_aliases
    ADD CONSTRAINT fk_adapter_aliases_adapter_id_version FOREIGN KEY (adapter_id, version) REFERENCES public.adapter_versions(adapter_id, version) ON DELETE CASCADE;
ALTER TABLE ONLY public.adapter_grants
    ADD CONSTRAINT fk_adapter_grants_adapter_id FOREIGN KEY (adapter_id) REFERENCES public.adapters(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.adapter_grants
    ADD CONSTRAINT fk_adapter_grants_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.adapter_versions
    ADD CONSTRAINT fk_adapter_versions_adapter_id FOREIGN KEY (adapter_id) REFERENCES public.adapters(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.adapters
    ADD CONSTRAINT fk_adapters_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.api_keys
    ADD CONSTRAINT fk_api_keys_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.batch_results
    ADD CONSTRAINT fk_batch_results_batch_id FOREIGN KEY (batch_id) REFERENCES public.batches(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.batches
    ADD CONSTRAINT fk_batches_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.files
    ADD CONSTRAINT fk_files_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.idempotency_keys
    ADD CONSTRAINT fk_idempotency_keys_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.uploads
    ADD CONSTRAINT fk_uploads_tenant_id FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;
