{{ config(materialized='incremental', incremental_strategy='append', tags=['incremental']) }}
select id, customer, amount from {{ source('service', 'orders') }}
{% if is_incremental() %}
where id > (select max(id) from {{ this }})
{% endif %}
