{{ config(materialized='materialized_view') }}
select case when n < 50 then 'few' else 'many' end as class, count(*) as customers
from {{ ref('by_customer_spent') }}
group by 1
